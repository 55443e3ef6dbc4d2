// exp, tanh and erfc of a vec within two units in the last place of fp32 (polynomials fitted for these ranges).

DEVICE inline vec exp(vec x) {
  const vec big = broadcast(0x1.8p23f);                       // adding it rounds to an integer, found in the low bits
  const vec shifted = x * broadcast(0x1.715476p+0f) + big;    // log2 e
  const vec n = shifted - big;
  const vec r = fma(n, broadcast(-0x1.7f7d1cp-20f), fma(n, broadcast(-0x1.62e4p-1f), x));  // ln 2 in two parts
  vec p = broadcast(0.0013934545f);
  p = fma(p, r, broadcast(0.00836377684f));
  p = fma(p, r, broadcast(0.0416664556f));
  p = fma(p, r, broadcast(0.166665733f));
  p = fma(p, r, broadcast(0.5f));
  p = fma(p * r, r, r) + broadcast(1.0f);
  const vec power = (vec)(((ivec)shifted - (ivec)big + broadcast((int32_t)127)) << 23);
  vec y = p * power;
  y = x < broadcast(-87.33f) ? vec{} : y;
  return x > broadcast(88.0f) ? broadcast(__builtin_inff()) : y;  // a gate of that size saturates: infinity is as good
}

DEVICE inline vec tanh(vec x) {
  const vec u = x * x;
  vec p = broadcast(-0.00610494148f);
  p = fma(p, u, broadcast(0.0210036356f));
  p = fma(p, u, broadcast(-0.0538524948f));
  p = fma(p, u, broadcast(0.133327827f));
  p = fma(p, u, broadcast(-0.333333284f));
  const vec near = fma(x * u, p, x);
  const vec far = broadcast(1.0f) - broadcast(2.0f) / (exp(x + x) + broadcast(1.0f));
  return u < broadcast(0.390625f) ? near : far;
}

// 1 − erf(x).
DEVICE inline vec erfc(vec x) {
  const vec size = x < vec{} ? -x : x;
  const vec t = broadcast(1.0f) / fma(size, broadcast(0.4f), broadcast(1.0f));
  vec p = broadcast(0.0794638321f);
  p = fma(p, t, broadcast(-0.419789135f));
  p = fma(p, t, broadcast(0.736445069f));
  p = fma(p, t, broadcast(-0.432714283f));
  p = fma(p, t, broadcast(0.447903275f));
  p = fma(p, t, broadcast(0.124326199f));
  p = fma(p, t, broadcast(0.239705339f));
  p = fma(p, t, broadcast(0.224659726f));
  const vec y = p * t * exp(-size * size);
  return x < vec{} ? broadcast(2.0f) - y : y;
}

DEVICE inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
DEVICE inline float exp(float x) { return exp(broadcast(x))[0]; }
