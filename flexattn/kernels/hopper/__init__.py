"""The warp-specialised prefill template, in Gluon, for GPUs with wgmma."""
