// dscores = scale * probability * (dprobability - sum(probability * dprobability)) over the keys up
// to the row's position, 0 after it; in place of dprobability, one workgroup a row.
struct Params {
  rows: u32, matrix_rows: u32, width: u32, first_row: u32, length: u32, scale: f32
}
@group(0) @binding(0) var<storage, read> probabilities: array<f32>;
@group(0) @binding(1) var<storage, read_write> gradient: array<f32>;
@group(0) @binding(2) var<uniform> p: Params;

//!use grid
//!use reduce

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let row = group_index(group, groups);
  if (row >= p.rows) { return; }
  let visible = (p.first_row + row % p.matrix_rows) % p.length + 1u;
  let base = row * p.width;
  var products = 0.0;
  for (var i = lane; i < visible; i += 64u) {
    products += probabilities[base + i] * gradient[base + i];
  }
  let along = sum_over_group(products, lane);
  for (var i = lane; i < visible; i += 64u) {
    gradient[base + i] = p.scale * probabilities[base + i] * (gradient[base + i] - along);
  }
  for (var i = visible + lane; i < p.width; i += 64u) { gradient[base + i] = 0.0; }
}
