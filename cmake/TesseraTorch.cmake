# libtorch from the wheel in the checkout's venv (or -DCMAKE_PREFIX_PATH), Gloo headers from Debian, one precompiled header.
if(NOT Torch_DIR AND EXISTS ${PROJECT_SOURCE_DIR}/.venv/lib)
  file(GLOB _torch_config ${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch/share/cmake/Torch)
  if(_torch_config)
    set(Torch_DIR ${_torch_config} CACHE PATH "Where TorchConfig.cmake is")
  endif()
endif()
find_package(Torch REQUIRED)
find_path(GLOO_INCLUDE_DIR gloo/config.h REQUIRED)

# All code that includes libtorch links this; Torch's own include paths are system ones: no warnings from there.
add_library(tessera_libtorch INTERFACE)
target_include_directories(tessera_libtorch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS} ${GLOO_INCLUDE_DIR})
target_compile_definitions(tessera_libtorch INTERFACE USE_C10D_GLOO)
target_link_libraries(tessera_libtorch INTERFACE ${TORCH_LIBRARIES})

# The precompiled header is built once, by tessera_pch; tessera_torch_pch(target) reuses it.
add_library(tessera_pch STATIC ${PROJECT_SOURCE_DIR}/src/torch/pch.cpp)
target_link_libraries(tessera_pch PUBLIC tessera_options tessera_libtorch)
target_compile_options(tessera_pch PRIVATE ${TESSERA_WARNINGS})
target_precompile_headers(tessera_pch PRIVATE ${PROJECT_SOURCE_DIR}/src/torch/pch.h)
function(tessera_torch_pch target)
  # Flags have to be equal, or the compiler passes over the header: programs get -fPIE from CMake, and
  # the last flag wins.
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL EXECUTABLE)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  target_precompile_headers(${target} REUSE_FROM tessera_pch)
  target_link_libraries(${target} PUBLIC tessera_libtorch)
endfunction()
