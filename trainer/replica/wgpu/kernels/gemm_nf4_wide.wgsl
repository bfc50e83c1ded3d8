//!use nf4
fn read4_b(i: u32) -> vec4<f32> {
  // Eight to a word; the high nibble of every byte comes first.
  let w = b[i >> 3u] >> ((i & 4u) << 2u);
  return scales[i >> 6u]
      * vec4<f32>(NF4[(w >> 4u) & 15u], NF4[w & 15u], NF4[(w >> 12u) & 15u], NF4[(w >> 8u) & 15u]);
}
