// Carries the precompiled header that all targets with LibTorch reuse.
