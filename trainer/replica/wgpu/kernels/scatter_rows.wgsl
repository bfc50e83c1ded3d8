// out[index[n]] = x[n], one workgroup a row; SKIPPED is dropped.
struct Params { count: u32, width: u32, rows: u32 }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> index: array<u32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
@group(0) @binding(3) var<uniform> p: Params;

//!use grid

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let n = group_index(group, groups);
  if (n >= p.count || index[n] >= p.rows) { return; }  // SKIPPED is the largest u32
  let base = index[n] * p.width;
  for (var i = lane; i < p.width; i += 64u) { out[base + i] = x[n * p.width + i]; }
}
