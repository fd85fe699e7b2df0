# Manual pages and completion scripts of the command, where help2man is installed.
find_program(TESSERA_HELP2MAN help2man)
if(NOT TESSERA_HELP2MAN)
  return()
endif()
set(_manual ${PROJECT_BINARY_DIR}/manual)
add_custom_command(OUTPUT ${_manual}/man/tessera.1
  COMMAND ${PROJECT_SOURCE_DIR}/tools/manual $<TARGET_FILE:tessera_command> ${_manual}
  DEPENDS tessera_command ${PROJECT_SOURCE_DIR}/tools/manual VERBATIM)
add_custom_target(tessera_manual ALL DEPENDS ${_manual}/man/tessera.1)
install(DIRECTORY ${_manual}/man/ DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT Command)
set(_completion ${_manual}/completion)
install(FILES ${_completion}/tessera.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME tessera COMPONENT Command)
install(FILES ${_completion}/_tessera DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions COMPONENT Command)
install(FILES ${_completion}/tessera.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d COMPONENT Command)
