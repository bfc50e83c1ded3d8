fn element_b(i: u32) -> f32 {
  // Eight to a word; the high nibble of every byte comes first.
  return scales[i >> 6u] * nf4(vec4<u32>((b[i >> 3u] >> (((i & 7u) ^ 1u) << 2u)) & 15u)).x;
}
//!use gemm_b_narrow
