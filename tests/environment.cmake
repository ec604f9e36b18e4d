# Temporary files lie in memory, so that tests do not wait for a disk.
if(NOT DEFINED ENV{TMPDIR})
  execute_process(COMMAND df -k --output=avail /dev/shm OUTPUT_VARIABLE kilobytes ERROR_QUIET)
  if(kilobytes MATCHES "[0-9]+" AND CMAKE_MATCH_0 GREATER 4000000)
    set(ENV{TMPDIR} /dev/shm)
  endif()
endif()
