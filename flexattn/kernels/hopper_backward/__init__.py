"""The warp-specialised backward template, in Gluon, for GPUs with wgmma."""
