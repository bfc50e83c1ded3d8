// dx (+)= scale * (weight * dy - x * mean(weight * dy * x) * scale^2), one workgroup a row. The
// forward's scale = 1 / sqrt(mean(x^2) + eps) is computed again.
struct Params { rows: u32, width: u32, eps: f32 }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read> dy: array<f32>;
@group(0) @binding(3) var<storage, read_write> dx: array<f32>;
@group(0) @binding(4) var<uniform> p: Params;
override ACCUMULATE: bool;

//!use grid
//!use reduce

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let row = group_index(group, groups);
  if (row >= p.rows) { return; }
  let base = row * p.width;
  var squares = 0.0;
  var products = 0.0;
  for (var i = lane; i < p.width; i += 64u) {
    let value = x[base + i];
    squares += value * value;
    products += weight[i] * dy[base + i] * value;
  }
  let scale = inverseSqrt(sum_over_group(squares, lane) / f32(p.width) + p.eps);
  let along = sum_over_group(products, lane) / f32(p.width) * scale * scale;
  for (var i = lane; i < p.width; i += 64u) {
    let gradient = scale * (weight[i] * dy[base + i] - x[base + i] * along);
    if (ACCUMULATE) { dx[base + i] += gradient; } else { dx[base + i] = gradient; }
  }
}
