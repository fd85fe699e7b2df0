# find_package(Torch), or libtorch's part for the CPU where that cannot succeed: the wheel that pip installs
# on Linux by default is built for CUDA, and its own package file asks for a CUDA toolkit. Without one that
# wheel still trains on the CPU, from libtorch_cpu alone. Sets TORCH_INCLUDE_DIRS and TORCH_LIBRARIES.
find_path(TESSERA_TORCH_CONFIG_DIR TorchConfig.cmake HINTS ${Torch_DIR} PATH_SUFFIXES share/cmake/Torch
          NO_CACHE)
set(_tessera_torch_cpu_only FALSE)
if(TESSERA_TORCH_CONFIG_DIR)
  get_filename_component(_tessera_torch ${TESSERA_TORCH_CONFIG_DIR}/../../.. ABSOLUTE)
  if(EXISTS ${_tessera_torch}/lib/libtorch_cuda.so)
    # The search by which the package file decides, with the module that it brings.
    set(_tessera_module_path ${CMAKE_MODULE_PATH})
    list(APPEND CMAKE_MODULE_PATH ${TESSERA_TORCH_CONFIG_DIR}/../Caffe2/Modules_CUDA_fix)
    set(CUDA_USE_STATIC_CUDA_RUNTIME OFF CACHE INTERNAL "")
    find_package(CUDA QUIET)
    set(CMAKE_MODULE_PATH ${_tessera_module_path})
    if(NOT CUDA_FOUND)
      set(_tessera_torch_cpu_only TRUE)
    endif()
  endif()
endif()

if(_tessera_torch_cpu_only)
  message(STATUS "Torch: built for CUDA, no CUDA toolkit here: the runtime is built for the CPU alone")
  set(TORCH_INCLUDE_DIRS ${_tessera_torch}/include ${_tessera_torch}/include/torch/csrc/api/include)
  set(TORCH_LIBRARIES tessera_torch_cpu)
  set(Torch_FOUND TRUE)
  set(Torch_DIR ${TESSERA_TORCH_CONFIG_DIR} CACHE PATH "Where TorchConfig.cmake is")
  if(NOT TARGET tessera_torch_cpu)
    add_library(tessera_torch_cpu INTERFACE IMPORTED GLOBAL)
    # What Caffe2Targets.cmake defines for its torch_cpu.
    target_compile_definitions(tessera_torch_cpu INTERFACE USE_DISTRIBUTED USE_C10D_GLOO USE_RPC USE_TENSORPIPE)
    # The CUDA libraries that it needs in turn are beside it in the venv; the loader finds them.
    target_link_options(tessera_torch_cpu INTERFACE LINKER:--allow-shlib-undefined)
    target_link_libraries(tessera_torch_cpu INTERFACE
                          ${_tessera_torch}/lib/libtorch_cpu.so ${_tessera_torch}/lib/libc10.so)
  endif()
else()
  find_package(Torch REQUIRED)
endif()
