fn read_b(i: u32) -> f32 { return b[i]; }
