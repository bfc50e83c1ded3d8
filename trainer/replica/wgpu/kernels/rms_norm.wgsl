// y = x / sqrt(mean(x^2) + eps) * weight, one workgroup a row (arXiv 1910.07467).
struct Params { rows: u32, width: u32, eps: f32 }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
@group(0) @binding(3) var<uniform> p: Params;

//!use grid
//!use reduce

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let row = group_index(group, groups);
  if (row >= p.rows) { return; }
  let base = row * p.width;
  var squares = 0.0;
  for (var i = lane; i < p.width; i += 64u) { squares += x[base + i] * x[base + i]; }
  let scale = inverseSqrt(sum_over_group(squares, lane) / f32(p.width) + p.eps);
  for (var i = lane; i < p.width; i += 64u) { y[base + i] = x[base + i] * scale * weight[i]; }
}
