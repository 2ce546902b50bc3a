{{/* What `kinroute worker` reads, and the pods of a pool. All take dict "root" $ "name" NAME "pool" POOL. */}}

{{/* A quantity of Kubernetes as the program writes sizes: 64Gi is 64GiB. */}}
{{- define "kinroute.size" -}}
{{ . }}{{ if hasSuffix "i" . }}B{{ end }}
{{- end -}}

{{- define "kinroute.poolName" -}}
{{ include "kinroute.fullname" .root }}-{{ .name }}
{{- end -}}

{{- define "kinroute.workerSettings" -}}
{{- $host := .root.Values.listenHost -}}
{{- $admin := dict "address" (printf "%s:7101" $host) "allow_plaintext" true -}}
{{- $listen := dict "grpc" (printf "%s:7100" $host) "admin" $admin -}}
{{- $transfer := dict "allowed_networks" .pool.allowedNetworks -}}
{{- if .root.Values.tls.internal.enabled -}}
{{- $_ := set $listen "tls" (dict
  "certificate_file" "/etc/kinroute/internal-tls/tls.crt"
  "key_file" "/etc/kinroute/internal-tls/tls.key"
  "client_ca_file" "/etc/kinroute/internal-tls/ca.crt") -}}
{{- $_ := set $transfer "tls" (dict
  "ca_file" "/etc/kinroute/internal-tls/ca.crt"
  "server_name" (include "kinroute.workerTlsName" .root)) -}}
{{- else -}}
{{- $_ := set $listen "allow_plaintext" true -}}
{{- end -}}
{{- $cache := dict "recording_max_bytes" 0 -}}
{{- with .pool.hostTier -}}{{- $_ := set $cache "host_cache_size" (include "kinroute.size" .) -}}{{- end -}}
{{- with .pool.diskTier.cacheSize -}}
{{- $_ := set $cache "disk_cache_size" (include "kinroute.size" .) -}}
{{- $_ := set $cache "disk_cache_path" "/var/lib/kinroute/cache" -}}
{{- end -}}
{{- with .pool.recordings.maxSize -}}
{{- $_ := set $cache "recording_max_bytes" (include "kinroute.size" .) -}}
{{- $_ := set $cache "recording_dir" "/var/lib/kinroute/recordings" -}}
{{- end -}}
{{- $settings := dict
  "model" (include "kinroute.modelPath" .root)
  "served_model_name" .root.Values.model.name
  "role" .pool.role
  "tensor_parallel_size" (int .pool.tensorParallelSize)
  "device" .pool.device
  "listen" $listen
  "kv_cache_config" $cache
  "kv_transfer" $transfer
  "keys_file" "/etc/kinroute/keys/worker-keys.json"
  "drain_timeout_s" .pool.drainTimeoutSeconds
-}}
{{- if gt (int .pool.hosts) 1 -}}
{{- $_ := set $settings "group" (dict "token_file" "/etc/kinroute/group/token") -}}
{{- end -}}
{{- mergeOverwrite (deepCopy .pool.settings) $settings | toYaml -}}
{{- end -}}

{{- define "kinroute.workerImage" -}}
{{ include "kinroute.image" (dict "root" .root "image" .root.Values.worker.image "suffix" (printf "-%s" .pool.device)) }}
{{- end -}}

{{- define "kinroute.workerResources" -}}
{{- $resources := deepCopy .pool.resources -}}
{{- if eq .pool.device "cuda" -}}
{{- $gpus := dict .pool.gpuResource (div (int .pool.tensorParallelSize) (int .pool.hosts)) -}}
{{- $_ := set $resources "limits" (merge (default dict $resources.limits) $gpus) -}}
{{- $_ := set $resources "requests" (merge (default dict $resources.requests) $gpus) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* A pod of a pool. "rank0": whether its worker listens there; "ranks": the arguments of torchrun, where it starts them. */}}
{{- define "kinroute.workerPod" -}}
metadata:
  labels:
    {{- include "kinroute.podLabels" .root | nindent 4 }}
    app.kubernetes.io/component: worker
    kinroute/pool: {{ .name }}
    kinroute/role: {{ .pool.role }}
  annotations:
    checksum/settings: {{ include "kinroute.workerSettings" . | sha256sum }}
    {{- with .pool.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "kinroute.podSecurity" .root | nindent 2 }}
  serviceAccountName: {{ include "kinroute.fullname" .root }}-worker
  # The launcher takes five seconds more than its deadline before it ends ranks that do not.
  terminationGracePeriodSeconds: {{ add .pool.drainTimeoutSeconds 10 }}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pool.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- include "kinroute.placing" (dict "of" .pool "selector" (include "kinroute.poolSelector" .)) | nindent 2 }}
  {{- $image := include "kinroute.workerImage" . }}
  {{- $policy := .root.Values.worker.image.pullPolicy }}
  {{- with include "kinroute.modelInit" (dict "root" .root "part" "worker" "image" $image "pullPolicy" $policy "resources" .pool.resources) }}
  initContainers: {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      image: {{ $image }}
      imagePullPolicy: {{ $policy }}
      {{- if gt (int .pool.hosts) 1 }}
      command: [torchrun]
      args:
        - --nnodes=$(LWS_GROUP_SIZE)
        - --node-rank=$(LWS_WORKER_INDEX)
        - --nproc-per-node={{ div (int .pool.tensorParallelSize) (int .pool.hosts) }}
        - --master-addr=$(LWS_LEADER_ADDRESS)
        - --master-port=29500
        - --max-restarts=0
        - --shutdown-timeout={{ add .pool.drainTimeoutSeconds 5 }}
        - --module
        - kinroute
        - worker
        - --config
        - /etc/kinroute/settings/worker.yaml
      {{- else }}
      command: [kinroute]
      args: [worker, --config, /etc/kinroute/settings/worker.yaml]
      {{- end }}
      env:
        - name: HOME
          value: /tmp
        - name: KINROUTE_WORKER_KV_TRANSFER__LISTEN_HOST
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        {{- with .pool.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if .rank0 }}
      ports:
        - name: grpc
          containerPort: 7100
        - name: admin
          containerPort: 7101
      # Ranks load the model first, and are started anew where they take longer than group.start_timeout_s.
      startupProbe:
        httpGet: {path: /ready, port: admin}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: {{ div (add (default 600 (.pool.settings.group).start_timeout_s | int) 60) 5 }}
      livenessProbe:
        httpGet: {path: /live, port: admin}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /ready, port: admin}
        periodSeconds: 2
        timeoutSeconds: 3
        failureThreshold: 2
      {{- else }}
      # Rank 0, in the leader, answers for the group. Here it is seen whether the ranks of this pod are there.
      {{- $probe := list "sh" "-c" "grep -qse '-m.kinroute[^a-z.]worker' /proc/[0-9]*/cmdline" }}
      startupProbe:
        exec: {command: {{ $probe | toJson }}}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 24
      livenessProbe:
        exec: {command: {{ $probe | toJson }}}
        periodSeconds: 20
        timeoutSeconds: 5
      readinessProbe:
        exec: {command: {{ $probe | toJson }}}
        periodSeconds: 20
        timeoutSeconds: 5
      {{- end }}
      {{- include "kinroute.containerSecurity" .root | nindent 6 }}
      resources: {{- include "kinroute.workerResources" . | nindent 8 }}
      volumeMounts:
        - name: settings
          mountPath: /etc/kinroute/settings
          readOnly: true
        - name: keys
          mountPath: /etc/kinroute/keys
          readOnly: true
        {{- include "kinroute.modelMount" .root | nindent 8 }}
        - name: tmp
          mountPath: /tmp
        - name: shm
          mountPath: /dev/shm
        {{- if gt (int .pool.hosts) 1 }}
        - name: group
          mountPath: /etc/kinroute/group
          readOnly: true
        {{- end }}
        {{- if .root.Values.tls.internal.enabled }}
        - name: internal-tls
          mountPath: /etc/kinroute/internal-tls
          readOnly: true
        {{- end }}
        {{- if .pool.diskTier.cacheSize }}
        - name: cache
          mountPath: /var/lib/kinroute/cache
        {{- end }}
        {{- if .pool.recordings.maxSize }}
        - name: recordings
          mountPath: /var/lib/kinroute/recordings
        {{- end }}
        {{- include "kinroute.secretMounts" (dict "files" .pool.secretFiles) | nindent 8 }}
  volumes:
    - name: settings
      configMap:
        name: {{ include "kinroute.poolName" . }}
    - name: keys
      secret:
        secretName: {{ include "kinroute.workerKeysSecret" .root }}
        defaultMode: 0440
    {{- include "kinroute.modelVolume" .root | nindent 4 }}
    - name: tmp
      emptyDir: {}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ .pool.sharedMemory }}
    {{- if gt (int .pool.hosts) 1 }}
    - name: group
      secret:
        secretName: {{ include "kinroute.groupTokenSecret" .root }}
        defaultMode: 0440
    {{- end }}
    {{- if .root.Values.tls.internal.enabled }}
    - name: internal-tls
      secret:
        secretName: {{ include "kinroute.workerTlsSecret" .root }}
        defaultMode: 0440
    {{- end }}
    {{- if .pool.diskTier.cacheSize }}
    - name: cache
      {{- if .pool.diskTier.storageClassName }}
      ephemeral:
        volumeClaimTemplate:
          spec:
            accessModes: [ReadWriteOnce]
            storageClassName: {{ .pool.diskTier.storageClassName }}
            resources:
              requests:
                storage: {{ .pool.diskTier.volumeSize }}
      {{- else }}
      emptyDir:
        sizeLimit: {{ .pool.diskTier.volumeSize }}
      {{- end }}
    {{- end }}
    {{- if .pool.recordings.maxSize }}
    - name: recordings
      emptyDir:
        sizeLimit: {{ .pool.recordings.maxSize }}
    {{- end }}
    {{- include "kinroute.secretVolumes" (dict "files" .pool.secretFiles) | nindent 4 }}
{{- end -}}
