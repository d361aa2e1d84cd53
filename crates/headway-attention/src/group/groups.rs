//! Lifetime: the model. An attention group: layers of one backend, one spec and one number of query
//! heads inside a KV cache group, with a builder for each micro-batch.

use crate::group::{kv::block_table::block_table_width, plan::attention_groups::BLOCK_TABLE_ALIGNMENT};
use crate::{AttentionGroupPlan, BuilderPlan, DynBackend, DynBuilder, ErasedConfig, GroupInfo, Result};
use headway_tensor::{Exec, Persistent};

/// What one micro-batch of a group owns.
pub(crate) struct MicroBatch {
    pub(crate) builder: Box<dyn DynBuilder>,
    pub(crate) kernel_block_table: Option<Persistent<i32>>,
}

/// A group of layers that share their metadata.
pub struct AttentionGroup {
    kv_cache_group: usize,
    backend: String,
    info: GroupInfo,
    plan: BuilderPlan,
    pub(crate) micro_batches: Vec<MicroBatch>,
    shares_with: Option<usize>,
    pub(crate) builds: usize,
    pub(crate) table_updates: usize,
}

impl AttentionGroup {
    /// Constructs the group's builders, one per micro-batch. `shares_with` is an earlier attention
    /// group whose metadata this one reuses with its own block table. `manager_block_size` is the
    /// block size of the KV cache group, in tokens.
    ///
    /// # Errors
    /// The builder's own; a kernel block size that doesn't divide the manager's.
    pub fn new(
        backend: &dyn DynBackend,
        cx: &dyn Exec,
        kv_cache_group: usize,
        info: GroupInfo,
        config: &ErasedConfig,
        num_micro_batches: usize,
        shares_with: Option<usize>,
    ) -> Result<Self> {
        let info = GroupInfo { shares_metadata: shares_with.is_some(), ..info };
        let plan = backend.plan(&info, config)?;
        let factor = info.blocks_per_manager_block()?;
        let size = info.spec.block_size();
        let width = block_table_width(info.max_model_len.div_ceil(size), size, Some(BLOCK_TABLE_ALIGNMENT))?;
        let micro_batches = (0..num_micro_batches)
            .map(|_| {
                Ok(MicroBatch {
                    builder: backend.builder(cx, &info, &plan, config)?,
                    kernel_block_table: (factor > 1)
                        .then(|| Persistent::new(cx, info.max_num_reqs * width * factor))
                        .transpose()?,
                })
            })
            .collect::<Result<_>>()?;
        let backend = backend.rules().name.to_string();
        Ok(Self {
            kv_cache_group,
            backend,
            info,
            plan,
            micro_batches,
            shares_with,
            builds: 0,
            table_updates: 0,
        })
    }

    /// Constructs a group that start-up planned.
    ///
    /// # Errors
    /// As [`AttentionGroup::new`].
    pub fn from_plan(
        plan: &AttentionGroupPlan,
        cx: &dyn Exec,
        config: &ErasedConfig,
        num_micro_batches: usize,
    ) -> Result<Self> {
        let (info, shares) = (plan.info.clone(), plan.shares_with);
        Self::new(&*plan.backend, cx, plan.kv_cache_group, info, config, num_micro_batches, shares)
    }

    /// The KV cache group whose block tables the layers use.
    pub fn kv_cache_group(&self) -> usize {
        self.kv_cache_group
    }

    /// The backend's name.
    pub fn backend(&self) -> &str {
        &self.backend
    }

    /// Layers, spec, limits.
    pub fn info(&self) -> &GroupInfo {
        &self.info
    }

    /// Support and sizes.
    pub fn plan(&self) -> &BuilderPlan {
        &self.plan
    }

    /// The earlier group whose metadata this one reuses.
    pub fn shares_with(&self) -> Option<usize> {
        self.shares_with
    }

    /// How often metadata was built, over all micro-batches.
    pub fn builds(&self) -> usize {
        self.builds
    }

    /// How often another group's metadata was reused with a swapped block table.
    pub fn table_updates(&self) -> usize {
        self.table_updates
    }
}

impl GroupInfo {
    /// Kernel blocks in one manager block.
    ///
    /// # Errors
    /// Where the kernel's block size doesn't divide the manager's.
    pub fn blocks_per_manager_block(&self) -> Result<usize> {
        let (manager, kernel) = (self.spec.block_size(), self.kernel_block_size);
        if kernel == 0 || !manager.is_multiple_of(kernel) {
            return Err(crate::AttentionError::KvCache(format!(
                "kernel block size {kernel} does not divide the block size {manager} of its KV cache group"
            )));
        }
        Ok(manager / kernel)
    }
}
