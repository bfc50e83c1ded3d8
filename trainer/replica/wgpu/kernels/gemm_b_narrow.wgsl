// Four neighbours of a row that has `size` elements; zeros beyond.
fn load_b(line: u32, at: u32, size: u32) -> vec4<f32> {
  let last = size - 1u;
  let four = vec4<f32>(
      element_b(line + min(at, last)), element_b(line + min(at + 1u, last)),
      element_b(line + min(at + 2u, last)), element_b(line + min(at + 3u, last)));
  return select(vec4<f32>(0.0), four, vec4<u32>(at) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(size));
}
