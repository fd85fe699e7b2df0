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

# A project that has this tree inside: the same targets, and nothing for developers. Configured alone: to build the library
# once more would take minutes.
foreach(component IN LISTS COMPONENTS)
  run(${CMAKE_COMMAND} -S ${PROJECT}/inside -B ${SCRATCH}/inside_${component} -G ${GENERATOR} -D TREE=${TESSERA_SOURCE}
      -D COMPONENT=${component} -D CMAKE_CXX_COMPILER=${COMPILER} -D Torch_DIR=${Torch_DIR})
  run(${CMAKE_COMMAND} --build ${SCRATCH}/inside_${component} --target help)
  if(output MATCHES "tessera_command|checkpoint_test|bench_plan")
    message(FATAL_ERROR "the project with the tree inside has these targets:\n${output}")
  endif()
endforeach()

# pkg-config knows what Tessera::Core knows, but for sanitizers.
if(NOT SANITIZE)
  file(GLOB_RECURSE description ${SCRATCH}/prefix/tessera.pc)
  cmake_path(GET description PARENT_PATH folder)
  set(ENV{PKG_CONFIG_PATH} ${folder})
  run(pkg-config --cflags --libs tessera)
  separate_arguments(flags UNIX_COMMAND "${output}")
  run(${COMPILER} ${PROJECT}/main.cpp -o ${SCRATCH}/by_pkg_config ${flags})
  # A shared library of a place that the loader does not know.
  cmake_path(GET folder PARENT_PATH libraries)
  set(ENV{LD_LIBRARY_PATH} ${libraries})
  run(${SCRATCH}/by_pkg_config ${CHECKPOINT} ${SCRATCH}/saved)
  if(NOT output MATCHES "step 7")
    message(FATAL_ERROR "the consumer of pkg-config printed: ${output}")
  endif()
endif()
file(REMOVE_RECURSE ${SCRATCH})
