// Like causal_softmax, but a buffer holds the position of each sample's first row.
struct Params { rows: u32, sample_rows: u32, width: u32, length: u32, scale: f32 }
@group(0) @binding(0) var<storage, read> starts: array<u32>;
@group(0) @binding(1) var<storage, read_write> scores: array<f32>;
@group(0) @binding(2) var<uniform> p: Params;

//!use grid
//!use reduce
//!use softmax_row

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let row = group_index(group, groups);
  if (row >= p.rows) { return; }
  softmax_row(row, starts[row / p.sample_rows] + row % p.length + 1u, lane);
}
