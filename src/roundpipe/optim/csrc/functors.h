// The optimizers: what one step does to one element.
//
// A functor's constructor derives its constants from the task, in double as torch does; the call
// updates one parameter and up to three states in place, in float32, with the operations of torch's
// CPU kernels in torch's order. The gradient it is given is already scaled, negated to maximize,
// and carries coupled (L2) decay. States beyond kStates are dummies.
//
// Part of kernels.h: compiled once per instruction set, in an anonymous namespace.

// a * b + c, rounded once, as torch computes it wherever the machine can. Elsewhere through double,
// where the product is exact: the second rounding changes the result only if the first one ended on
// a tie, once in some 2^29 cases.
inline float multiply_add(float a, float b, float c) {
#if ROUNDPIPE_FMA
    return __builtin_fmaf(a, b, c);
#else
    return static_cast<float>(static_cast<double>(a) * b + c);
#endif
}

inline float square_root(float a) {
    return __builtin_sqrtf(a);
}
inline float maximum(float a, float b) {
    return (a > b || a != a) ? a : b;
}  // NaN if either is
inline float sign_of(float a) {
    return static_cast<float>(a > 0.0f) - static_cast<float>(a < 0.0f);
}

// start + weight * (end - start), from the nearer end.
struct Lerp {
    float coefficient;
    bool from_start;
    explicit Lerp(double weight)
        : coefficient(static_cast<float>(weight < 0.5 ? weight : weight - 1)),
          from_start(weight < 0.5) {}
    float operator()(float start, float end) const {
        return multiply_add(coefficient, end - start, from_start ? start : end);
    }
};

// Moving average of squares: square * beta + (1 - beta) * value^2.
struct SquareAverage {
    float beta, weight;
    explicit SquareAverage(double beta)
        : beta(static_cast<float>(beta)), weight(static_cast<float>(1 - beta)) {}
    float operator()(float square, float value) const {
        return multiply_add(weight * value, value, square * beta);
    }
};

inline double bias_correction(double beta, double step) {
    return 1 - std::pow(beta, step);
}

// Kingma and Ba 2015; decoupled decay: Loshchilov and Hutter 2019; AMSGrad: Reddi et al. 2018.
// scalars: lr, beta1, beta2, eps, step, decoupled decay. states: average, square, (largest square).
template <bool kAmsgrad>
struct Adam {
    static constexpr int kStates = kAmsgrad ? 3 : 2;
    Lerp lerp;
    SquareAverage square_average;
    float correction2_root, eps, step_size, decay;
    explicit Adam(const double* s)
        : lerp(1 - s[1]),
          square_average(s[2]),
          correction2_root(static_cast<float>(std::sqrt(bias_correction(s[2], s[4])))),
          eps(static_cast<float>(s[3])),
          step_size(static_cast<float>(s[0] / bias_correction(s[1], s[4]))),
          decay(static_cast<float>(1 - s[0] * s[5])) {}
    void operator()(float grad, float& param, float& average, float& square, float& largest) const {
        param *= decay;
        average = lerp(average, grad);
        square = square_average(square, grad);
        float second = square;
        if constexpr (kAmsgrad) second = largest = maximum(largest, square);
        param -= step_size * average / (square_root(second) / correction2_root + eps);
    }
};

// scalars: lr, momentum, weight of the gradient in the momentum. states: (momentum).
template <bool kMomentum, bool kNesterov>
struct Sgd {
    static constexpr int kStates = kMomentum;
    float lr, momentum, weight;
    explicit Sgd(const double* s)
        : lr(static_cast<float>(s[0])),
          momentum(static_cast<float>(s[1])),
          weight(static_cast<float>(s[2])) {}
    void operator()(float grad, float& param, float& buffer, float&, float&) const {
        float direction = grad;
        if constexpr (kMomentum) direction = buffer = multiply_add(grad, weight, buffer * momentum);
        if constexpr (kNesterov) direction = multiply_add(buffer, momentum, grad);
        param = multiply_add(direction, -lr, param);
    }
};

// Duchi et al. 2011. scalars: lr, lr_decay, eps, step. states: sum of squares.
struct Adagrad {
    static constexpr int kStates = 1;
    float lr, eps;
    explicit Adagrad(const double* s)
        : lr(static_cast<float>(s[0] / (1 + (s[3] - 1) * s[1]))), eps(static_cast<float>(s[2])) {}
    void operator()(float grad, float& param, float& sum, float&, float&) const {
        sum = multiply_add(grad, grad, sum);
        param -= lr * grad / (square_root(sum) + eps);
    }
};

// Hinton's lecture; centered: Graves 2013.
// scalars: lr, alpha, eps, momentum. states: square, then (average), then (momentum).
template <bool kCentered, bool kMomentum>
struct Rmsprop {
    static constexpr int kStates = 1 + kCentered + kMomentum;
    float lr, eps, momentum;
    Lerp lerp;
    SquareAverage square_average;
    explicit Rmsprop(const double* s)
        : lr(static_cast<float>(s[0])),
          eps(static_cast<float>(s[2])),
          momentum(static_cast<float>(s[3])),
          lerp(1 - s[1]),
          square_average(s[1]) {}
    void operator()(float grad, float& param, float& square, float& second, float& third) const {
        square = square_average(square, grad);
        float variance = square;
        if constexpr (kCentered) {
            second = lerp(second, grad);
            variance = multiply_add(-second, second, square);
        }
        const float divisor = square_root(variance) + eps;
        if constexpr (kMomentum) {
            float& buffer = kCentered ? third : second;
            buffer = buffer * momentum + grad / divisor;
            param = multiply_add(buffer, -lr, param);
        } else {
            param -= lr * grad / divisor;
        }
    }
};

// Kingma and Ba 2015, section 7.1. scalars: lr, beta1, beta2, eps, step. states: average, infinity
// norm.
struct Adamax {
    static constexpr int kStates = 2;
    Lerp lerp;
    float beta2, eps, step_size;
    explicit Adamax(const double* s)
        : lerp(1 - s[1]),
          beta2(static_cast<float>(s[2])),
          eps(static_cast<float>(s[3])),
          step_size(static_cast<float>(s[0] / bias_correction(s[1], s[4]))) {}
    void operator()(float grad, float& param, float& average, float& norm, float&) const {
        average = lerp(average, grad);
        norm = maximum(norm * beta2, __builtin_fabsf(grad) + eps);
        param -= step_size * average / norm;
    }
};

// Dozat 2016. scalars: beta1, beta2, eps, step, gradient's and average's step size, lr * decoupled
// decay. states: average, square.
struct Nadam {
    static constexpr int kStates = 2;
    Lerp lerp;
    SquareAverage square_average;
    float correction2, eps, grad_step, average_step, decay;
    explicit Nadam(const double* s)
        : lerp(1 - s[0]),
          square_average(s[1]),
          correction2(static_cast<float>(bias_correction(s[1], s[3]))),
          eps(static_cast<float>(s[2])),
          grad_step(static_cast<float>(s[4])),
          average_step(static_cast<float>(s[5])),
          decay(static_cast<float>(1 - s[6])) {}
    void operator()(float grad, float& param, float& average, float& square, float&) const {
        param *= decay;
        average = lerp(average, grad);
        square = square_average(square, grad);
        const float divisor = square_root(square / correction2) + eps;
        param -= grad_step * grad / divisor;
        param -= average_step * average / divisor;
    }
};

// Liu et al. 2020. scalars: lr, beta1, beta2, eps, step, decoupled decay. states: average, square.
// The unrectified form of the first steps is a rectifier of one.
struct Radam {
    static constexpr int kStates = 2;
    Lerp lerp;
    SquareAverage square_average;
    float lr, correction1, correction2_root, eps, rectifier, decay;
    bool rectified;
    explicit Radam(const double* s)
        : lerp(1 - s[1]),
          square_average(s[2]),
          lr(static_cast<float>(s[0])),
          correction1(static_cast<float>(bias_correction(s[1], s[4]))),
          correction2_root(static_cast<float>(std::sqrt(bias_correction(s[2], s[4])))),
          eps(static_cast<float>(s[3])),
          decay(static_cast<float>(1 - s[0] * s[5])) {
        const double longest = 2 / (1 - s[2]) - 1;
        const double length =
            longest - 2 * s[4] * std::pow(s[2], s[4]) / bias_correction(s[2], s[4]);
        rectified = length > 5;
        rectifier = rectified
                        ? static_cast<float>(std::sqrt((length - 4) * (length - 2) * longest /
                                                       ((longest - 4) * (longest - 2) * length)))
                        : 1.0f;
    }
    void operator()(float grad, float& param, float& average, float& square, float&) const {
        param *= decay;
        average = lerp(average, grad);
        square = square_average(square, grad);
        const float adaptive = correction2_root / (square_root(square) + eps);
        param -= average / correction1 * lr * (rectified ? adaptive : 1.0f) * rectifier;
    }
};

// Zeiler 2012. scalars: lr, rho, eps. states: square, square of the updates.
struct Adadelta {
    static constexpr int kStates = 2;
    float lr, eps;
    SquareAverage square_average;
    explicit Adadelta(const double* s)
        : lr(static_cast<float>(s[0])), eps(static_cast<float>(s[2])), square_average(s[1]) {}
    void operator()(float grad, float& param, float& square, float& update_square, float&) const {
        square = square_average(square, grad);
        const float update = square_root(update_square + eps) / square_root(square + eps) * grad;
        update_square = square_average(update_square, update);
        param = multiply_add(update, -lr, param);
    }
};

// Polyak and Juditsky 1992. scalars: eta, lambd * eta, mu (one: not yet averaging). states:
// averaged parameter.
struct Asgd {
    static constexpr int kStates = 1;
    float eta, decay, mu;
    explicit Asgd(const double* s)
        : eta(static_cast<float>(s[0])),
          decay(static_cast<float>(1 - s[1])),
          mu(static_cast<float>(s[2])) {}
    void operator()(float grad, float& param, float& averaged, float&, float&) const {
        param = multiply_add(grad, -eta, param * decay);
        averaged = mu == 1.0f ? param : averaged + (param - averaged) * mu;
    }
};

// Riedmiller and Braun 1993. scalars: eta minus, eta plus, smallest and largest step. states: last
// gradient, step size.
struct Rprop {
    static constexpr int kStates = 2;
    float shrink, grow, smallest, largest;
    explicit Rprop(const double* s)
        : shrink(static_cast<float>(s[0])),
          grow(static_cast<float>(s[1])),
          smallest(static_cast<float>(s[2])),
          largest(static_cast<float>(s[3])) {}
    void operator()(float grad, float& param, float& last, float& size, float&) const {
        const float agreement = grad * last;
        size *= agreement > 0.0f ? grow : (agreement < 0.0f ? shrink : 1.0f);
        size = size < smallest ? smallest : size;
        size = size > largest ? largest : size;
        last = agreement < 0.0f ? 0.0f : grad;
        param -= sign_of(last) * size;
    }
};

// Chen et al. 2023. scalars: lr, beta1, beta2, decoupled decay. states: average.
struct Lion {
    static constexpr int kStates = 1;
    float lr, decay;
    Lerp direction, lerp;
    explicit Lion(const double* s)
        : lr(static_cast<float>(s[0])),
          decay(static_cast<float>(1 - s[0] * s[3])),
          direction(1 - s[1]),
          lerp(1 - s[2]) {}
    void operator()(float grad, float& param, float& average, float&, float&) const {
        param = multiply_add(sign_of(direction(average, grad)), -lr, param * decay);
        average = lerp(average, grad);
    }
};
