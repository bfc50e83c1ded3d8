// sums[part] = sum of dy * x * scale over the part's rows, one workgroup a part; scale is the
// forward's 1 / sqrt(mean(x^2) + eps) of a row. A lane owns its columns: no races.
struct Params { rows: u32, width: u32, parts: u32, eps: f32 }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> dy: array<f32>;
@group(0) @binding(2) var<storage, read_write> sums: array<f32>;
@group(0) @binding(3) var<uniform> p: Params;

//!use grid
//!use reduce

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let part = group_index(group, groups);
  if (part >= p.parts) { return; }
  let rows = (p.rows + p.parts - 1u) / p.parts;
  let stop = min((part + 1u) * rows, p.rows);
  let sum = part * p.width;
  for (var i = lane; i < p.width; i += 64u) { sums[sum + i] = 0.0; }
  for (var row = part * rows; row < stop; row++) {
    let base = row * p.width;
    var squares = 0.0;
    for (var i = lane; i < p.width; i += 64u) { squares += x[base + i] * x[base + i]; }
    let scale = inverseSqrt(sum_over_group(squares, lane) / f32(p.width) + p.eps);
    for (var i = lane; i < p.width; i += 64u) {
      sums[sum + i] += dy[base + i] * x[base + i] * scale;
    }
  }
}
