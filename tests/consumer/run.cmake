# Installs TESSERA_BUILD into a fresh prefix as `make install` does; builds PROJECT against each of COMPONENTS alone,
# in fresh folders, and runs it on CHECKPOINT.
file(REMOVE_RECURSE ${SCRATCH})

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${ARGN}: exit ${status}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

# -o: the build is there.
run(make -C ${TESSERA_SOURCE} -o build install PREFIX=${SCRATCH}/prefix BUILD=${TESSERA_BUILD})
run(readelf --section-headers --wide ${SCRATCH}/prefix/bin/tessera)
if(output MATCHES "debug_info")
  message(FATAL_ERROR "the installed command has debug information")
endif()
foreach(component IN LISTS COMPONENTS)
  set(folder ${SCRATCH}/${component})
  run(${CMAKE_COMMAND} -S ${PROJECT} -B ${folder} -G ${GENERATOR} -D COMPONENT=${component}
      -D CMAKE_CXX_COMPILER=${COMPILER} -D CMAKE_PREFIX_PATH=${SCRATCH}/prefix -D Torch_DIR=${Torch_DIR})
  run(${CMAKE_COMMAND} --build ${folder})
  run(${folder}/consumer ${CHECKPOINT} ${folder}/saved)
  if(NOT output MATCHES "^[1-9][0-9]* tensors.*step 7")
    message(FATAL_ERROR "the consumer printed: ${output}")
  endif()
endforeach()

# A project that has this tree inside: the same targets, nothing for developers, and nothing of it in what the project
# installs. Objects come from the compiler's cache, where there is one.
set(folder ${SCRATCH}/inside)
# As tools/compiler-cache has them.
set(ENV{CCACHE_SLOPPINESS} pch_defines,time_macros)
set(ENV{CCACHE_BASEDIR} ${TESSERA_SOURCE})
set(ENV{CCACHE_NOHASHDIR} yes)
set(ENV{CCACHE_DEPEND} yes)
set(ENV{CCACHE_NAMESPACE} tessera-depend)
run(${CMAKE_COMMAND} -S ${PROJECT}/inside -B ${folder} -G ${GENERATOR} -D TREE=${TESSERA_SOURCE} -D COMPONENT=Core
    -D CMAKE_BUILD_TYPE=RelWithDebInfo -D "CMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2 -g1 -DNDEBUG" -D CMAKE_CXX_COMPILER=${COMPILER}
    -D CMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER} -D TESSERA_TORCH=OFF)
run(${CMAKE_COMMAND} --build ${folder} --target consumer)
run(${folder}/consumer ${CHECKPOINT} ${folder}/saved)
if(NOT output MATCHES "^[1-9][0-9]* tensors.*step 7")
  message(FATAL_ERROR "the consumer with the tree inside printed: ${output}")
endif()
run(${CMAKE_COMMAND} --build ${folder} --target help)
if(output MATCHES "tessera_command|checkpoint_test|bench_")
  message(FATAL_ERROR "targets for developers are there:\n${output}")
endif()
run(${CMAKE_COMMAND} --install ${folder} --prefix ${SCRATCH}/of_inside)
file(GLOB installed ${SCRATCH}/of_inside/*)
if(installed)
  message(FATAL_ERROR "the project inside installs ${installed}")
endif()
if("Torch" IN_LIST COMPONENTS)
  run(${CMAKE_COMMAND} -S ${PROJECT}/inside -B ${SCRATCH}/inside_torch -G ${GENERATOR} -D TREE=${TESSERA_SOURCE}
      -D COMPONENT=Torch -D CMAKE_CXX_COMPILER=${COMPILER} -D Torch_DIR=${Torch_DIR})
endif()

# pkg-config knows what Tessera::Core knows, but for sanitizers.
if(NOT SANITIZE)
  file(GLOB_RECURSE description ${SCRATCH}/prefix/tessera.pc)
  cmake_path(GET description PARENT_PATH folder)
  set(ENV{PKG_CONFIG_PATH} ${folder})
  run(pkg-config --cflags --libs tessera)
  separate_arguments(flags UNIX_COMMAND "${output}")
  run(${COMPILER} ${PROJECT}/main.cpp -o ${SCRATCH}/by_pkg_config ${flags})
  run(${SCRATCH}/by_pkg_config ${CHECKPOINT} ${SCRATCH}/saved)
  if(NOT output MATCHES "step 7")
    message(FATAL_ERROR "the consumer of pkg-config printed: ${output}")
  endif()
endif()
file(REMOVE_RECURSE ${SCRATCH})
