// best[row] = the first column that holds the row's largest value; a lane a row.
struct Params { rows: u32, width: u32 }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> best: array<u32>;
@group(0) @binding(2) var<uniform> p: Params;

//!use grid

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let row = group_index(group, groups) * 64u + lane;
  if (row >= p.rows) { return; }
  let base = row * p.width;
  var largest = 0u;
  for (var i = 1u; i < p.width; i++) {
    if (x[base + i] > x[base + largest]) { largest = i; }
  }
  best[row] = largest;
}
