fn load_b(line: u32, at: u32, size: u32) -> vec4<f32> { return b[(line + at) >> 2u]; }
