//! What the builder of Triton's unified attention computes. The kernel has two forms: one program a
//! query block and key head, and one that also cuts the keys into segments and merges their softmaxes
//! afterwards. The second fills the device where a decode batch is small, and needs memory for the parts.

/// Segments of a row's keys.
pub const SOFTMAX_SEGMENTS: usize = 16;

/// What the buffers are sized by.
#[derive(Clone, Copy, Debug)]
pub struct SegmentConfig<'a> {
    /// Query heads on this rank.
    pub num_heads: usize,
    /// Key heads on this rank.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_size: usize,
    /// The device's compute units.
    pub compute_units: usize,
    /// Most requests in a step.
    pub max_num_reqs: usize,
    /// Captured batch sizes, where decodes run as full graphs.
    pub capture_sizes: Option<&'a [usize]>,
}

/// The persistent buffers of a softmax in segments, 32-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoftmaxSegments {
    /// From this number of requests on the form without segments runs.
    pub threshold: usize,
    /// Rows: the most requests that the form with segments sees.
    pub rows: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Elements of a head, rounded up to a power of 2.
    pub head_size_padded: usize,
}

impl SoftmaxSegments {
    /// The form without segments has requests x key heads programs at least. It is taken once these reach
    /// the device's compute units; with full graphs at the nearest captured size instead (the smaller of
    /// two), so that each graph has one form.
    pub fn new(config: &SegmentConfig<'_>) -> Self {
        let fills = config.compute_units / config.num_kv_heads.max(1);
        let captured = config.capture_sizes.unwrap_or(&[]).iter().copied();
        let threshold = captured.min_by_key(|&c| (c.abs_diff(fills), c)).unwrap_or(fills);
        Self {
            threshold,
            rows: threshold.min(config.max_num_reqs),
            num_heads: config.num_heads,
            head_size_padded: config.head_size.next_power_of_two(),
        }
    }

    /// Shape of the partial outputs.
    pub fn output_shape(&self) -> [usize; 4] {
        [self.rows, self.num_heads, SOFTMAX_SEGMENTS, self.head_size_padded]
    }

    /// Shape of the partial maxima, and of the sums of exponentials.
    pub fn scalar_shape(&self) -> [usize; 3] {
        [self.rows, self.num_heads, SOFTMAX_SEGMENTS]
    }

    /// Bytes of the three buffers.
    pub fn bytes(&self) -> usize {
        let scalars: usize = self.scalar_shape().iter().product();
        scalars * (self.head_size_padded + 2) * size_of::<f32>()
    }
}
