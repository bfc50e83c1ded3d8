// state[row] = (largest z, sum of exponentials, score of the targets, unused) of no classes yet.
struct Params { rows: u32 }
@group(0) @binding(0) var<storage, read_write> state: array<vec4<f32>>;
@group(0) @binding(1) var<uniform> p: Params;

//!use grid

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let row = group_index(group, groups) * 64u + lane;
  if (row < p.rows) { state[row] = vec4<f32>(-3.4e38, 0.0, 0.0, 0.0); }
}
