// gate and up become their gradients; silu'(g) = s + g * s * (1 - s) with s = sigmoid(g).
struct Params { size: u32 }
@group(0) @binding(0) var<storage, read> dy: array<f32>;
@group(0) @binding(1) var<storage, read_write> gate: array<f32>;
@group(0) @binding(2) var<storage, read_write> up: array<f32>;
@group(0) @binding(3) var<uniform> p: Params;

//!use grid

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let i = group_index(group, groups) * 256u + lane;
  if (i >= p.size) { return; }
  let g = gate[i];
  let s = 1.0 / (1.0 + exp(-g));
  gate[i] = dy[i] * up[i] * (s + g * s * (1.0 - s));
  up[i] = dy[i] * g * s;
}
