# find_package(Torch), or libtorch without its package file where that cannot succeed: the wheel that pip installs on
# Linux by default is built for CUDA, and its own package file asks for a CUDA toolkit. Nothing here needs one: wheels
# have CUDA's headers, and where these are beside torch (tools/cuda-setup says which) the runtime is built for CUDA.
# With neither headers nor a toolkit that wheel still trains on the CPU, from libtorch_cpu alone. Sets
# TORCH_INCLUDE_DIRS and TORCH_LIBRARIES.
find_path(TESSERA_TORCH_CONFIG_DIR TorchConfig.cmake HINTS ${Torch_DIR} PATH_SUFFIXES share/cmake/Torch
          NO_CACHE)
set(_tessera_torch_target)
set(_tessera_cuda_dirs)
if(TESSERA_TORCH_CONFIG_DIR)
  get_filename_component(_tessera_torch ${TESSERA_TORCH_CONFIG_DIR}/../../.. ABSOLUTE)
  if(EXISTS ${_tessera_torch}/lib/libtorch_cuda.so)
    # What headers of libtorch include, one of each wheel.
    file(GLOB _tessera_cuda_dirs ${_tessera_torch}/../nvidia/*/include ${_tessera_torch}/../nvidia/*/include/cccl)
    set(_tessera_cuda_missing)
    foreach(_header cuda_runtime_api.h crt/host_defines.h cuda/std/utility nvtx3/nvtx3.hpp cublas_v2.h cusparse.h
                    cusolverDn.h nccl.h)
      find_path(_tessera_cuda_dir ${_header} PATHS ${_tessera_cuda_dirs} NO_DEFAULT_PATH NO_CACHE)
      if(NOT _tessera_cuda_dir)
        list(APPEND _tessera_cuda_missing ${_header})
      endif()
      unset(_tessera_cuda_dir)
    endforeach()
    if(NOT _tessera_cuda_missing)
      set(_tessera_torch_target tessera_torch_cuda)
      message(STATUS "Torch: built for CUDA, with the headers of CUDA's wheels")
    else()
      # The search by which the package file decides, with the module that it brings.
      set(_tessera_module_path ${CMAKE_MODULE_PATH})
      list(APPEND CMAKE_MODULE_PATH ${TESSERA_TORCH_CONFIG_DIR}/../Caffe2/Modules_CUDA_fix)
      set(CUDA_USE_STATIC_CUDA_RUNTIME OFF CACHE INTERNAL "")
      find_package(CUDA QUIET)
      set(CMAKE_MODULE_PATH ${_tessera_module_path})
      if(NOT CUDA_FOUND)
        set(_tessera_torch_target tessera_torch_cpu)
        list(JOIN _tessera_cuda_missing ", " _tessera_cuda_missing)
        message(STATUS "Torch: built for CUDA, no CUDA toolkit here and no wheels with ${_tessera_cuda_missing}: "
                       "the runtime is built for the CPU alone")
      endif()
    endif()
  endif()
endif()

if(_tessera_torch_target)
  set(TORCH_INCLUDE_DIRS ${_tessera_torch}/include ${_tessera_torch}/include/torch/csrc/api/include)
  set(TORCH_LIBRARIES ${_tessera_torch_target})
  set(Torch_FOUND TRUE)
  set(Torch_DIR ${TESSERA_TORCH_CONFIG_DIR} CACHE PATH "Where TorchConfig.cmake is")
  if(NOT TARGET tessera_torch_cpu)
    add_library(tessera_torch_cpu INTERFACE IMPORTED GLOBAL)
    # What Caffe2Targets.cmake defines for its torch_cpu.
    target_compile_definitions(tessera_torch_cpu INTERFACE USE_DISTRIBUTED USE_C10D_GLOO USE_RPC USE_TENSORPIPE)
    # The CUDA libraries that it needs in turn are beside it in the venv, or where the program will run; the loader
    # finds them.
    target_link_options(tessera_torch_cpu INTERFACE LINKER:--allow-shlib-undefined)
    target_link_libraries(tessera_torch_cpu INTERFACE
                          ${_tessera_torch}/lib/libtorch_cpu.so ${_tessera_torch}/lib/libc10.so)
  endif()
  if(_tessera_torch_target STREQUAL tessera_torch_cuda)
    list(APPEND TORCH_INCLUDE_DIRS ${_tessera_cuda_dirs})
    if(NOT TARGET tessera_torch_cuda)
      add_library(tessera_torch_cuda INTERFACE IMPORTED GLOBAL)
      # What Caffe2Targets.cmake defines for its torch_cuda, as far as headers ask.
      target_compile_definitions(tessera_torch_cuda INTERFACE USE_C10D_NCCL)
      # Programs need its kernels, whether or not they name one of its functions.
      target_link_libraries(tessera_torch_cuda INTERFACE
        -Wl,--push-state,--no-as-needed,${_tessera_torch}/lib/libtorch_cuda.so,--pop-state
        ${_tessera_torch}/lib/libc10_cuda.so tessera_torch_cpu)
    endif()
  endif()
else()
  find_package(Torch REQUIRED)
  # A toolkit has no NCCL; its wheel beside torch does.
  find_path(_tessera_nccl_dir nccl.h PATHS ${_tessera_cuda_dirs} NO_DEFAULT_PATH NO_CACHE)
  if(_tessera_nccl_dir)
    list(APPEND TORCH_INCLUDE_DIRS ${_tessera_nccl_dir})
  endif()
endif()
