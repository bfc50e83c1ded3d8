fn load_a(line: u32, at: u32, size: u32) -> vec4<f32> { return a[(line + at) >> 2u]; }
