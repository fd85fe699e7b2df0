# libtorch from the wheel in the checkout's venv (or -DCMAKE_PREFIX_PATH), Gloo headers from Debian, one precompiled header.
if(NOT Torch_DIR AND EXISTS ${PROJECT_SOURCE_DIR}/.venv/lib)
  file(GLOB _torch_config ${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch/share/cmake/Torch)
  if(_torch_config)
    set(Torch_DIR ${_torch_config} CACHE PATH "Where TorchConfig.cmake is")
  endif()
endif()
include(${CMAKE_CURRENT_LIST_DIR}/TesseraFindTorch.cmake)
find_path(GLOO_INCLUDE_DIR gloo/config.h REQUIRED)

# All code that includes libtorch links this; Torch's own include paths are system ones: no warnings from there.
add_library(tessera_libtorch INTERFACE)
target_include_directories(tessera_libtorch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS} ${GLOO_INCLUDE_DIR})
# TESSERA_WITH_TORCH: tessera/tessera.h has the runtime too.
target_compile_definitions(tessera_libtorch INTERFACE USE_C10D_GLOO TESSERA_WITH_TORCH)
target_link_libraries(tessera_libtorch INTERFACE ${TORCH_LIBRARIES})

# Tests of libtorch spend their time inside of it: optimizing them takes a seventh of their build and makes none quicker.
function(tessera_unoptimized target)
  if(NOT TESSERA_SANITIZE)
    target_compile_options(${target} PRIVATE $<$<CONFIG:RelWithDebInfo>:-O0>)
  endif()
endfunction()

# The precompiled header is built twice, for libraries and for what is quick to build;
# tessera_torch_pch(target) reuses the one whose flags are the target's.
function(tessera_make_pch target)
  add_library(${target} STATIC ${PROJECT_SOURCE_DIR}/src/torch/pch.cpp)
  target_link_libraries(${target} PUBLIC tessera_options tessera_libtorch)
  target_compile_options(${target} PRIVATE ${TESSERA_WARNINGS})
  target_precompile_headers(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src/torch/pch.h)
endfunction()
tessera_make_pch(tessera_pch)
if(TESSERA_TESTS)
  tessera_make_pch(tessera_quick_pch)
  tessera_quick_to_build(tessera_quick_pch)
  tessera_unoptimized(tessera_quick_pch)
endif()

function(tessera_torch_pch target)
  # Flags have to be equal, or the compiler passes over the header: programs get -fPIE from CMake, and
  # the last flag wins.
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL EXECUTABLE)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  get_target_property(quick ${target} TESSERA_QUICK_TO_BUILD)
  if(quick)
    tessera_unoptimized(${target})
    target_precompile_headers(${target} REUSE_FROM tessera_quick_pch)
  else()
    target_precompile_headers(${target} REUSE_FROM tessera_pch)
  endif()
  target_link_libraries(${target} PUBLIC tessera_libtorch)
  # What files of a unit share of libtorch's templates is compiled once.
  if(TESSERA_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE BATCH UNITY_BUILD_BATCH_SIZE 8)
  endif()
endfunction()
