# The library as programs link it. `tessera_linked` is that for what is built here and sees public headers alone, or
# private ones that say so (`#pragma GCC visibility`): the static libraries, or with -DBUILD_SHARED_LIBS=ON libtessera.so,
# which is made of all of them. Only what public headers declare is visible in it.
add_library(tessera_linked INTERFACE)
if(BUILD_SHARED_LIBS AND TESSERA_TORCH)
  message(FATAL_ERROR "-DBUILD_SHARED_LIBS=ON makes libtessera.so of the checkpoint library: it needs -DTESSERA_TORCH=OFF")
endif()
# Both are made of the same objects. So the tests of a build of archives link the shared library, too (src/cli).
get_property(_core GLOBAL PROPERTY TESSERA_LIBRARIES)
list(REMOVE_ITEM _core tessera_options)
set_target_properties(${_core} PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
if(NOT BUILD_SHARED_LIBS)
  target_link_libraries(tessera_linked INTERFACE tessera_checkpoint)
  if(NOT TESSERA_TESTS OR TESSERA_SANITIZE)
    return()
  endif()
endif()

set(_objects ${_core})
list(TRANSFORM _objects REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>")
add_library(tessera_shared SHARED ${_objects})
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _soversion ${PROJECT_VERSION})  # a minor version may change the ABI
set_target_properties(tessera_shared PROPERTIES OUTPUT_NAME tessera EXPORT_NAME shared LINKER_LANGUAGE CXX
                      VERSION ${PROJECT_VERSION} SOVERSION ${_soversion})
# The archives bring what they need of others; their own objects are here already.
target_link_libraries(tessera_shared PUBLIC tessera_options PRIVATE ${_core})
target_link_options(tessera_shared PRIVATE -Wl,--no-undefined)
if(BUILD_SHARED_LIBS)
  target_link_libraries(tessera_linked INTERFACE tessera_shared)
endif()
