fn store(origin: u32, row: u32, col: u32, sum: vec4<f32>) {
  if (row >= p.m || col >= p.n) { return; }
  let i = (origin + row * p.ldc + col) >> 2u;
  var value = p.alpha * sum;
  if (p.accumulate != 0u) { value += c[i]; }
  c[i] = value;
}
