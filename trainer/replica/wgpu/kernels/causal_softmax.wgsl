// Softmax of scores over the keys up to the row's position, one workgroup a row. The rows of a
// matrix are at positions 0 to length - 1, repeated for every head of a group.
struct Params { rows: u32, matrix_rows: u32, width: u32, first_row: u32, length: u32, scale: f32 }
@group(0) @binding(0) var<storage, read_write> scores: array<f32>;
@group(0) @binding(1) var<uniform> p: Params;

//!use grid
//!use reduce
//!use softmax_row

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let row = group_index(group, groups);
  if (row >= p.rows) { return; }
  softmax_row(row, (p.first_row + row % p.matrix_rows) % p.length + 1u, lane);
}
