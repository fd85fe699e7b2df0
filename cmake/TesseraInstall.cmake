# The targets Tessera::Core (no libtorch) and Tessera::Torch, which have these names in this build, in one that has it
# inside, and by find_package; and, with TESSERA_INSTALL, `cmake --install` of the two as components.
include(CMakePackageConfigHelpers)

set(TESSERA_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)

# What the runtime links is the consumer's own libtorch, found again by the package file: this build's
# paths into a wheel mean nothing elsewhere.
function(tessera_rebind_libtorch)
  foreach(property INTERFACE_INCLUDE_DIRECTORIES INTERFACE_SYSTEM_INCLUDE_DIRECTORIES
                   INTERFACE_LINK_LIBRARIES)
    get_target_property(values tessera_libtorch ${property})
    if(values)
      set_property(TARGET tessera_libtorch PROPERTY ${property} "$<BUILD_INTERFACE:${values}>")
    endif()
  endforeach()
  set_property(TARGET tessera_libtorch APPEND PROPERTY
               INTERFACE_LINK_LIBRARIES "$<INSTALL_INTERFACE:Tessera::found_libtorch>")
endfunction()

# Sorts the libraries into components: whatever links tessera_libtorch, itself or through others, is Torch.
function(tessera_links_libtorch target result)
  get_target_property(dependencies ${target} INTERFACE_LINK_LIBRARIES)
  set(${result} FALSE PARENT_SCOPE)
  foreach(dependency IN LISTS dependencies)
    if(dependency STREQUAL tessera_libtorch)
      set(${result} TRUE PARENT_SCOPE)
    elseif(dependency MATCHES "^tessera_" AND TARGET ${dependency})
      tessera_links_libtorch(${dependency} nested)
      if(nested)
        set(${result} TRUE PARENT_SCOPE)
      endif()
    endif()
  endforeach()
endfunction()

# tessera_component(Core targets...): the target Tessera::Core; to be installed, the export set and its file.
function(tessera_component component)
  string(TOLOWER tessera_${component} umbrella)
  add_library(${umbrella}_all INTERFACE)
  target_link_libraries(${umbrella}_all INTERFACE ${ARGN})
  add_library(Tessera::${component} ALIAS ${umbrella}_all)
  set_target_properties(${umbrella}_all PROPERTIES EXPORT_NAME ${component})
  if(NOT TESSERA_INSTALL)
    return()
  endif()
  install(TARGETS ${umbrella}_all ${ARGN} EXPORT Tessera${component}
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT ${component}
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT ${component})
  install(EXPORT Tessera${component} NAMESPACE Tessera:: FILE Tessera${component}Targets.cmake
          DESTINATION ${TESSERA_PACKAGE_DIR} COMPONENT ${component})
endfunction()

get_property(_libraries GLOBAL PROPERTY TESSERA_LIBRARIES)
set(_core_libraries)
set(_torch_libraries)
foreach(_library IN LISTS _libraries)
  tessera_links_libtorch(${_library} _is_torch)
  if(_is_torch)
    list(APPEND _torch_libraries ${_library})
  else()
    list(APPEND _core_libraries ${_library})
  endif()
endforeach()

if(BUILD_SHARED_LIBS)
  tessera_component(Core tessera_shared tessera_options)
else()
  tessera_component(Core ${_core_libraries})
endif()
if(TESSERA_TORCH)
  tessera_rebind_libtorch()
  set_target_properties(tessera_libtorch PROPERTIES EXPORT_NAME libtorch)
  tessera_component(Torch tessera_libtorch ${_torch_libraries})
  # A trainer saves and loads: Tessera::Torch is all that it has to link.
  target_link_libraries(tessera_torch_all INTERFACE tessera_core_all)
endif()

# Old names of headers, for whoever has this project inside as for whoever has it installed.
foreach(_pair IN LISTS TESSERA_OLD_HEADERS)
  string(REPLACE "=" ";" _pair ${_pair})
  list(GET _pair 0 _old)
  list(GET _pair 1 _new)
  string(REGEX REPLACE "/.*" "" _header ${_new})
  set(_component Core)
  if(_header IN_LIST TESSERA_TORCH_HEADERS)
    set(_component Torch)
  endif()
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/old-headers/tessera/${_old} CONTENT
       "// Stands in ${_new} now; this name goes in version 0.2.\n#pragma once\n\n#include \"tessera/${_new}\"\n")
  get_filename_component(_folder tessera/${_old} DIRECTORY)
  if(TESSERA_INSTALL AND (TESSERA_TORCH OR _component STREQUAL Core))
    install(FILES ${PROJECT_BINARY_DIR}/old-headers/tessera/${_old}
            DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/${_folder} COMPONENT ${_component})
  endif()
endforeach()
if(NOT PROJECT_IS_TOP_LEVEL)
  target_include_directories(tessera_options INTERFACE $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/old-headers>)
endif()

if(NOT TESSERA_INSTALL)
  return()
endif()

# What `cmake --install` takes of a build without libtorch.
add_custom_target(tessera_core_installed)
add_dependencies(tessera_core_installed ${_core_libraries})
if(TARGET tessera_command)
  add_dependencies(tessera_core_installed tessera_command)
endif()
if(TARGET tessera_manual)
  add_dependencies(tessera_core_installed tessera_manual)
endif()

set(_not_core)
foreach(_header IN LISTS TESSERA_TORCH_HEADERS)
  list(APPEND _not_core PATTERN ${_header} EXCLUDE)
  if(TESSERA_TORCH)
    if(IS_DIRECTORY ${PROJECT_SOURCE_DIR}/include/tessera/${_header})
      install(DIRECTORY include/tessera/${_header}
              DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tessera COMPONENT Torch)
    else()
      install(FILES include/tessera/${_header}
              DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tessera COMPONENT Torch)
    endif()
  endif()
endforeach()
install(DIRECTORY include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT Core ${_not_core})
configure_package_config_file(cmake/TesseraConfig.cmake.in ${PROJECT_BINARY_DIR}/TesseraConfig.cmake
                              INSTALL_DESTINATION ${TESSERA_PACKAGE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/TesseraConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)

# For pkg-config: the archives with what they need, or the one library.
set(TESSERA_PC_LIBS -ltessera)
set(TESSERA_PC_REQUIRES)
if(NOT BUILD_SHARED_LIBS)
  set(TESSERA_PC_LIBS ${_core_libraries})
  list(REMOVE_ITEM TESSERA_PC_LIBS tessera_options)
  list(REVERSE TESSERA_PC_LIBS)
  list(TRANSFORM TESSERA_PC_LIBS PREPEND -l)
  list(JOIN TESSERA_PC_LIBS " " TESSERA_PC_LIBS)
  set(TESSERA_PC_LIBS "-Wl,--start-group ${TESSERA_PC_LIBS} -Wl,--end-group -pthread -ldl")
  set(TESSERA_PC_REQUIRES "Requires: fmt libdeflate libxxhash libzstd re2 yaml-cpp zlib")
  if(TESSERA_REMOTE)
    string(APPEND TESSERA_PC_REQUIRES " pugixml")
  endif()
endif()
file(RELATIVE_PATH TESSERA_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/tessera.pc.in ${PROJECT_BINARY_DIR}/tessera.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/tessera.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT Core)
install(FILES LICENSE CHANGELOG.md SECURITY.md DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/tessera COMPONENT Core)

install(FILES ${PROJECT_BINARY_DIR}/TesseraConfig.cmake ${PROJECT_BINARY_DIR}/TesseraConfigVersion.cmake
              cmake/TesseraFindTorch.cmake
        DESTINATION ${TESSERA_PACKAGE_DIR} COMPONENT Core)
