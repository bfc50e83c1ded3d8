// Logits of a window become their gradient, ((sum_k p_k) softmax(z) - p) / temperature; one
// workgroup a row. A row that does not count becomes 0.
struct Params { rows: u32, width: u32, first: u32, targets: u32, sharpness: f32 }
@group(0) @binding(0) var<storage, read_write> logits: array<f32>;
@group(0) @binding(1) var<storage, read> state: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> classes: array<u32>;
@group(0) @binding(3) var<storage, read> probabilities: array<f32>;
@group(0) @binding(4) var<uniform> p: Params;

//!use grid

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let row = group_index(group, groups);
  if (row >= p.rows) { return; }
  let base = row * p.width;
  let first = row * p.targets;
  let stop = first + p.targets;
  var mass = 0.0;
  for (var k = first; k < stop; k++) { mass += probabilities[k]; }
  let largest = state[row].x;
  let factor = mass * p.sharpness / state[row].y;
  for (var i = lane; i < p.width; i += 64u) {
    var gradient = 0.0;
    if (mass != 0.0) { gradient = factor * exp(logits[base + i] * p.sharpness - largest); }
    logits[base + i] = gradient;
  }
  storageBarrier();
  // A row's classes differ, so no lanes collide; entries of probability 0 may repeat and are skipped.
  for (var k = first + lane; k < stop; k += 64u) {
    let place = classes[k] - p.first;
    if (probabilities[k] != 0.0 && place < p.width) {
      logits[base + place] -= probabilities[k] * p.sharpness;
    }
  }
}
