//!use nf4
fn read_b(i: u32) -> f32 {
  // Eight to a word; the high nibble of every byte comes first.
  return scales[i >> 6u] * NF4[(b[i >> 3u] >> (((i & 7u) ^ 1u) << 2u)) & 15u];
}
