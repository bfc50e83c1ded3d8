// NF4 (Dettmers et al., arXiv 2305.14314, appendix E) from a table in workgroup memory, which
// `main` fills.
const NF4 = array<f32, 16>(
  -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
  -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
  0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
  0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0);
var<workgroup> table: array<f32, 16>;
fn nf4(code: vec4<u32>) -> vec4<f32> {
  return vec4<f32>(table[code.x], table[code.y], table[code.z], table[code.w]);
}
