// dx[b, t, h] = the gradient through norm and rotation of dout[b, h, t], one workgroup a head of a
// token; without norm and rotation the plain inverse of split_heads. See rms_norm_backward.
struct Params { rows: u32, heads: u32, length: u32, head_dim: u32, eps: f32 }
@group(0) @binding(0) var<storage, read> dout: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;
@group(0) @binding(3) var<storage, read> cosines: array<f32>;
@group(0) @binding(4) var<storage, read> sines: array<f32>;
@group(0) @binding(5) var<storage, read_write> dx: array<f32>;
@group(0) @binding(6) var<uniform> p: Params;
override NORM: bool;
override ROPE: bool;

//!use grid
//!use reduce

// Element i of a head, turned back by its position's angles.
fn turned_back(place: u32, position: u32, i: u32) -> f32 {
  let value = dout[place + i];
  if (!ROPE) { return value; }
  let half = p.head_dim / 2u;
  let angle = position * half + i % half;
  let other = dout[place + (i + half) % p.head_dim];
  return value * cosines[angle] + select(-other, other, i < half) * sines[angle];
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let row = group_index(group, groups);
  if (row >= p.rows) { return; }
  let head = row % p.heads;
  let position = row / p.heads % p.length;
  let sample = row / p.heads / p.length;
  let place = ((sample * p.heads + head) * p.length + position) * p.head_dim;
  let base = row * p.head_dim;
  var scale = 1.0;
  var along = 0.0;
  if (NORM) {
    var squares = 0.0;
    var products = 0.0;
    for (var i = lane; i < p.head_dim; i += 64u) {
      let value = x[base + i];
      squares += value * value;
      products += weight[i] * turned_back(place, position, i) * value;
    }
    scale = inverseSqrt(sum_over_group(squares, lane) / f32(p.head_dim) + p.eps);
    along = sum_over_group(products, lane) / f32(p.head_dim) * scale * scale;
  }
  for (var i = lane; i < p.head_dim; i += 64u) {
    var gradient = turned_back(place, position, i);
    if (NORM) { gradient = scale * (weight[i] * gradient - x[base + i] * along); }
    dx[base + i] = gradient;
  }
}
