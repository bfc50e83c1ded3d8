struct Params {
  m: u32, n: u32, k: u32, batch: u32,
  lda: u32, ldb: u32, ldc: u32, accumulate: u32,
  stride_a: u32, stride_b: u32, stride_c: u32, alpha: f32,
  offset_a: u32, offset_b: u32, offset_c: u32,
}
