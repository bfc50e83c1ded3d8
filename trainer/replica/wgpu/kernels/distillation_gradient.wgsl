// Logits of a window become the gradient of both losses of a row, one workgroup a row:
// shares[0] (softmax(logits) - label) + shares[1] ((sum_k w_k) softmax(z) - w) / temperature.
// A row that does not count becomes 0.
struct Params { rows: u32, width: u32, first: u32, entries: u32, sharpness: f32 }
@group(0) @binding(0) var<storage, read_write> logits: array<f32>;
@group(0) @binding(1) var<storage, read> hard: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> soft: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> labels: array<u32>;
@group(0) @binding(4) var<storage, read> counts: array<f32>;
@group(0) @binding(5) var<storage, read> classes: array<u32>;
@group(0) @binding(6) var<storage, read> weights: array<f32>;
@group(0) @binding(7) var<storage, read> shares: array<f32>;
@group(0) @binding(8) var<uniform> p: Params;

//!use grid

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
  let row = group_index(group, groups);
  if (row >= p.rows) { return; }
  let base = row * p.width;
  let first = row * p.entries;
  let stop = first + p.entries;
  var mass = 0.0;
  for (var k = first; k < stop; k++) { mass += weights[k]; }
  let label_factor = shares[0] * counts[row];
  let sharpness = shares[1] * p.sharpness;
  let hard_factor = label_factor / hard[row].y;
  let soft_factor = sharpness * mass / soft[row].y;
  for (var i = lane; i < p.width; i += 64u) {
    let logit = logits[base + i];
    var gradient = 0.0;
    if (counts[row] != 0.0) { gradient = hard_factor * exp(logit - hard[row].x); }
    if (mass != 0.0) { gradient += soft_factor * exp(logit * p.sharpness - soft[row].x); }
    logits[base + i] = gradient;
  }
  storageBarrier();
  // A row's classes differ, so no lanes collide; entries of weight 0 may repeat and are skipped.
  for (var k = first + lane; k < stop; k += 64u) {
    let place = classes[k] - p.first;
    if (weights[k] != 0.0 && place < p.width) { logits[base + place] -= sharpness * weights[k]; }
  }
  storageBarrier();
  let place = labels[row] - p.first;
  if (lane == 0u && counts[row] != 0.0 && place < p.width) { logits[base + place] -= label_factor; }
}
