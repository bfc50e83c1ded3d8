fn store(origin: u32, row: u32, col: u32, sum: vec4<f32>) {
  if (row >= p.m) { return; }
  for (var j = 0u; j < 4u; j++) {
    if (col + j < p.n) {
      let i = origin + row * p.ldc + col + j;
      var value = p.alpha * sum[j];
      if (p.accumulate != 0u) { value += c[i]; }
      c[i] = value;
    }
  }
}
