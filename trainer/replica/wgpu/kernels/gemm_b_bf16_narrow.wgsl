fn element_b(i: u32) -> f32 {
  let two = b[i >> 1u];
  return bitcast<f32>(select(two << 16u, two & 0xffff0000u, (i & 1u) == 1u));
}
//!use gemm_b_narrow
