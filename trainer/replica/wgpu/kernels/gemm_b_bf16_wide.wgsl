fn load_b(line: u32, at: u32, size: u32) -> vec4<f32> {
  let two = b[(line + at) >> 2u];
  let low = two << vec2<u32>(16u);
  let high = two & vec2<u32>(0xffff0000u);
  return bitcast<vec4<f32>>(vec4<u32>(low.x, high.x, low.y, high.y));
}
