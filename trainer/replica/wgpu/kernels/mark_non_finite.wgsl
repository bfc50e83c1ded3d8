// flag = 1 if any element is NaN or Inf. Their exponent bits are all set; a comparison is not
// reliable, since compilers may take nan != nan for false.
struct Params { size: u32 }
@group(0) @binding(0) var<storage, read> x: array<u32>;
@group(0) @binding(1) var<storage, read_write> flag: atomic<u32>;
@group(0) @binding(2) var<uniform> p: Params;

//!use grid

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let i = group_index(group, groups) * 256u + lane;
  if (i < p.size && (x[i] & 0x7f800000u) == 0x7f800000u) { atomicMax(&flag, 1u); }
}
