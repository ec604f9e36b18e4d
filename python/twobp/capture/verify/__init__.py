"""The programs' numbers against those of the module under autograd."""
