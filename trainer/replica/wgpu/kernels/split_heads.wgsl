// out[b, h, slot] = rotate(norm(x[b, t, h])), one workgroup a head of a token. The rotation turns
// (first half, second half) of a head by its position's angles (RoFormer, arXiv 2104.09864, in the
// order of Llama).
struct Params { rows: u32, heads: u32, length: u32, head_dim: u32, slots: u32, eps: f32 }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read> cosines: array<f32>;
@group(0) @binding(3) var<storage, read> sines: array<f32>;
@group(0) @binding(4) var<storage, read> starts: array<u32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;
@group(0) @binding(6) var<uniform> p: Params;
override NORM: bool;
override ROPE: bool;
override STARTS: bool;
override CACHED: bool;

//!use grid
//!use reduce

fn normed(row: u32, i: u32, scale: f32) -> f32 {
  let value = x[row * p.head_dim + i];
  if (NORM) { return value * scale * weight[i]; }
  return value;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let row = group_index(group, groups);
  if (row >= p.rows) { return; }
  let head = row % p.heads;
  let token = row / p.heads % p.length;
  let sample = row / p.heads / p.length;
  var position = token;
  if (STARTS) { position += starts[sample]; }
  let slot = select(token, position, CACHED);
  let place = ((sample * p.heads + head) * p.slots + slot) * p.head_dim;
  var scale = 1.0;
  if (NORM) {
    var squares = 0.0;
    for (var i = lane; i < p.head_dim; i += 64u) {
      let value = x[row * p.head_dim + i];
      squares += value * value;
    }
    scale = inverseSqrt(sum_over_group(squares, lane) / f32(p.head_dim) + p.eps);
  }
  let half = p.head_dim / 2u;
  for (var i = lane; i < p.head_dim; i += 64u) {
    var value = normed(row, i, scale);
    if (ROPE) {
      let angle = position * half + i % half;
      let other = normed(row, (i + half) % p.head_dim, scale);
      value = value * cosines[angle] + select(other, -other, i < half) * sines[angle];
    }
    out[place + i] = value;
  }
}
