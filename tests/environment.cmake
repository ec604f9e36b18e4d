# Temporary files lie in memory, so that tests do not wait for a disk. The link is for tests of paths: those under /dev are streams.
if(NOT DEFINED ENV{TMPDIR})
  execute_process(COMMAND df -k --output=avail /dev/shm OUTPUT_VARIABLE kilobytes ERROR_QUIET)
  if(kilobytes MATCHES "[0-9]+" AND CMAKE_MATCH_0 GREATER 4000000)
    file(CREATE_LINK /dev/shm ${CMAKE_CURRENT_LIST_DIR}/memory SYMBOLIC)
    set(ENV{TMPDIR} ${CMAKE_CURRENT_LIST_DIR}/memory)
  endif()
endif()
