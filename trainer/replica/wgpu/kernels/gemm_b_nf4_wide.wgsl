fn load_b(line: u32, at: u32, size: u32) -> vec4<f32> {
  // Eight to a word; the high nibble of every byte comes first.
  let i = line + at;
  let w = b[i >> 3u] >> ((i & 4u) << 2u);
  return scales[i >> 6u] * nf4((vec4<u32>(w) >> vec4<u32>(4u, 0u, 12u, 8u)) & vec4<u32>(15u));
}
