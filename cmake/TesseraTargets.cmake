# One library, test or program a call; every folder's CMakeLists.txt is a few of these.
include(GNUInstallDirs)

# GCC 12 takes an insert into an empty vector for an overflow.
set(TESSERA_WARNINGS -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wno-unused-parameter
    $<$<CXX_COMPILER_ID:GNU>:-Wno-stringop-overflow>)

# Programs are many, and lld links each in a third of the time.
find_program(TESSERA_LLD ld.lld)
if(TESSERA_LLD)
  add_link_options(-fuse-ld=lld)
endif()

add_library(tessera_options INTERFACE)
target_compile_features(tessera_options INTERFACE cxx_std_20)
target_include_directories(tessera_options INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
if(TESSERA_SANITIZE)
  target_compile_options(tessera_options INTERFACE
    -fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=undefined)
  target_link_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE})
endif()
set_property(GLOBAL PROPERTY TESSERA_LIBRARIES tessera_options)

# A folder's files of a target are compiled at once: what they share of headers and templates is compiled once. A name in
# an anonymous namespace is unique in its folder therefore.
function(tessera_unity target)
  if(NOT TESSERA_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # Takes the files of a unit for headers, which others may include too.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    get_filename_component(folder ${source} DIRECTORY)
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP "of_${folder}")
  endforeach()
endfunction()

# Tests and tools of tests: what they check is compiled as users get it, they themselves as quickly as possible.
# Sanitizers want their own flags and line numbers.
function(tessera_quick_to_build target)
  set_target_properties(${target} PROPERTIES TESSERA_QUICK_TO_BUILD ON)
  if(NOT TESSERA_SANITIZE)
    target_compile_options(${target} PRIVATE $<$<CONFIG:RelWithDebInfo>:-O1$<SEMICOLON>-g0>)
  endif()
endfunction()

# tessera_library(base SOURCES a.cpp DEPS ... PRIVATE_DEPS ...): the static library tessera_base, alias Tessera::base.
function(tessera_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS;PRIVATE_DEPS" ${ARGN})
  set(target tessera_${name})
  add_library(${target} STATIC ${ARG_SOURCES})
  add_library(Tessera::${name} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  tessera_unity(${target})
  target_compile_options(${target} PRIVATE ${TESSERA_WARNINGS})
  target_link_libraries(${target} PUBLIC tessera_options ${ARG_DEPS} PRIVATE ${ARG_PRIVATE_DEPS})
  set_property(GLOBAL APPEND PROPERTY TESSERA_LIBRARIES ${target})
endfunction()

# tessera_test(base SOURCES a_test.cpp DEPS tessera_base): the program base_test, each TEST one ctest entry.
# WHOLE: one ctest entry for the program, for tests whose start is expensive (libtorch).
function(tessera_test name)
  if(NOT TESSERA_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "WHOLE" "TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  set(target ${name}_test)
  add_executable(${target} ${ARG_SOURCES})
  tessera_unity(${target})
  target_compile_options(${target} PRIVATE ${TESSERA_WARNINGS})
  tessera_quick_to_build(${target})
  target_compile_definitions(${target} PRIVATE TESSERA_TEST_DATA="${PROJECT_SOURCE_DIR}/tests")
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${target} PRIVATE ${ARG_DEPS} GTest::gtest GTest::gmock GTest::gtest_main)
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(TESSERA_SANITIZE)
    math(EXPR ARG_TIMEOUT "${ARG_TIMEOUT} * 10")
  endif()
  if(ARG_WHOLE)
    add_test(NAME ${name} COMMAND ${target})
    set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT})
  else()
    gtest_discover_tests(${target} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
      PROPERTIES TIMEOUT ${ARG_TIMEOUT})
  endif()
endfunction()
