fn read4_b(i: u32) -> vec4<f32> { return b[i >> 2u]; }
