# Puts links to the files of the package into the build folder, and the version of torch with which the module is built.
file(GLOB entries RELATIVE ${FROM} ${FROM}/*)
foreach(entry IN LISTS entries)
  if(NOT entry STREQUAL "__pycache__")
    file(CREATE_LINK ${FROM}/${entry} ${TO}/${entry} SYMBOLIC)
  endif()
endforeach()
file(WRITE ${TO}/_native.torch ${TORCH})
