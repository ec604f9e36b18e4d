# Installs the library so that another CMake project can find_package(twobp).
if(NOT TWOBP_TORCH)
  return()
endif()
include(CMakePackageConfigHelpers)

set(installed twobp_core twobp_schedule twobp_plan twobp_config twobp_files twobp_nn twobp_data twobp_graph twobp_models
  twobp_transport twobp_pipeline twobp_train twobp_trace twobp_autograd)
set(programs)
if(TARGET twobp_program)
  set(programs twobp_program)
endif()
# An installation is whole or is not begun: ./demo builds the program alone, without all of the libraries. Rules run in the order in which they
# are written, so what is installed is in this file.
set(check "")
foreach(target IN LISTS installed programs)
  string(APPEND check "if(NOT EXISTS \"$<TARGET_FILE:${target}>\")\n  list(APPEND missing ${target})\nendif()\n")
endforeach()
install(CODE "${check}if(missing)
  list(JOIN missing \", \" missing)
  message(FATAL_ERROR \"not built yet: \${missing}. Nothing was installed. First run: cmake --build ${PROJECT_BINARY_DIR}\")
endif()")
if(programs)
  install(TARGETS ${programs} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(TARGETS ${installed} EXPORT twobpTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/twobp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT twobpTargets NAMESPACE twobp:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/twobp)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/twobpConfig.cmake.in ${PROJECT_BINARY_DIR}/twobpConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/twobp)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/twobpConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/twobpConfig.cmake ${PROJECT_BINARY_DIR}/twobpConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/twobp)
