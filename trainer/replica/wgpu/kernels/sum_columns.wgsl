// sums[part] (+)= the part's rows of x, added in their order; a lane owns a column of a part.
struct Params { rows: u32, width: u32, parts: u32 }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> sums: array<f32>;
@group(0) @binding(2) var<uniform> p: Params;
override ACCUMULATE: bool;

//!use grid

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let blocks = (p.width + 63u) / 64u;
  let index = group_index(group, groups);
  let part = index / blocks;
  let column = index % blocks * 64u + lane;
  if (part >= p.parts || column >= p.width) { return; }
  let rows = (p.rows + p.parts - 1u) / p.parts;
  let stop = min((part + 1u) * rows, p.rows);
  var sum = 0.0;
  for (var row = part * rows; row < stop; row++) { sum += x[row * p.width + column]; }
  let place = part * p.width + column;
  if (ACCUMULATE) { sums[place] += sum; } else { sums[place] = sum; }
}
