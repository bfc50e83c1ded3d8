fn element_b(i: u32) -> f32 { return b[i]; }
//!use gemm_b_narrow
