// Adds the classes of a window to state, one workgroup a row: the largest z so far, the sum of
// exp(z - largest), rescaled where the largest grew, and sum_k p_k z_k; z = logit / temperature.
struct Params { rows: u32, width: u32, first: u32, targets: u32, sharpness: f32 }
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read_write> state: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> classes: array<u32>;
@group(0) @binding(3) var<storage, read> probabilities: array<f32>;
@group(0) @binding(4) var<uniform> p: Params;

//!use grid
//!use reduce

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let row = group_index(group, groups);
  if (row >= p.rows) { return; }
  let base = row * p.width;
  let before = state[row];
  var largest = before.x;
  for (var i = lane; i < p.width; i += 64u) {
    largest = max(largest, logits[base + i] * p.sharpness);
  }
  largest = max_over_group(largest, lane);
  var sum = 0.0;
  for (var i = lane; i < p.width; i += 64u) {
    sum += exp(logits[base + i] * p.sharpness - largest);
  }
  sum = sum_over_group(sum, lane);
  var score = 0.0;
  for (var k = row * p.targets + lane; k < (row + 1u) * p.targets; k += 64u) {
    let place = classes[k] - p.first;  // a class before the window wraps around
    if (place < p.width) { score += probabilities[k] * logits[base + place] * p.sharpness; }
  }
  score = sum_over_group(score, lane);
  if (lane == 0u) {
    let rescaled = before.y * exp(before.x - largest) + sum;
    let seen = nan_unless_finite(largest, rescaled);
    state[row] = vec4<f32>(seen, rescaled, before.z + score, 0.0);
  }
}
