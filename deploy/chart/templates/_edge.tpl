{{/* What `kinroute edge` reads. */}}

{{/* The addresses of workers, as JSON {"context": […], "generation": […]}. The one place where an edge's list of workers is made. */}}
{{- define "kinroute.workerAddresses" -}}
{{- $context := list -}}
{{- $generation := list -}}
{{- range $name, $pool := include "kinroute.pools" . | fromJson -}}
{{- $service := printf "%s-%s" (include "kinroute.fullname" $) $name -}}
{{- range $index := until (int $pool.replicas) -}}
{{- $address := printf "%s-%d.%s.%s.svc.%s:7100" $service $index $service $.Release.Namespace $.Values.clusterDomain -}}
{{- if ne $pool.role "generation" -}}{{- $context = append $context $address -}}{{- end -}}
{{- if ne $pool.role "context" -}}{{- $generation = append $generation $address -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if not $generation -}}
{{- fail "pools has no worker that generates: at least one pool needs role generation or aggregated, and replicas" -}}
{{- end -}}
{{- if not $context -}}
{{- fail "pools has no worker for prompts: at least one pool needs role context or aggregated, and replicas" -}}
{{- end -}}
{{- dict "context" $context "generation" $generation | toJson -}}
{{- end -}}

{{- define "kinroute.edgeSettings" -}}
{{- $addresses := include "kinroute.workerAddresses" . | fromJson -}}
{{- $host := .Values.listenHost -}}
{{- $admin := dict "address" (printf "%s:8001" $host) "allow_plaintext" true -}}
{{- $listen := dict "http" (printf "%s:8000" $host) "admin" $admin -}}
{{- if .Values.edge.grpc -}}{{- $_ := set $listen "grpc" (printf "%s:8002" $host) -}}{{- end -}}
{{- if .Values.tls.clients.enabled -}}
{{- $_ := set $listen "tls" (dict "certificate_file" "/etc/kinroute/clients-tls/tls.crt" "key_file" "/etc/kinroute/clients-tls/tls.key") -}}
{{- else -}}
{{- $_ := set $listen "allow_plaintext" true -}}
{{- end -}}
{{- $replicas := ternary .Values.edge.autoscaling.maxReplicas .Values.edge.replicas .Values.edge.autoscaling.enabled | int -}}
{{- $settings := dict
  "model" (dict "name" .Values.model.name "aliases" .Values.model.aliases "path" (include "kinroute.modelPath" .))
  "listen" $listen
  "context_servers" $addresses.context
  "generation_servers" $addresses.generation
  "keys_file" "/etc/kinroute/keys/keys.json"
  "drain_timeout_s" .Values.edge.drainTimeoutSeconds
  "limits" (dict "replicas" $replicas)
-}}
{{- if .Values.tls.internal.enabled -}}
{{- $_ := set $settings "worker_tls" (dict
  "ca_file" "/etc/kinroute/internal-tls/ca.crt"
  "certificate_file" "/etc/kinroute/internal-tls/tls.crt"
  "key_file" "/etc/kinroute/internal-tls/tls.key"
  "server_name" (include "kinroute.workerTlsName" .)) -}}
{{- end -}}
{{- mergeOverwrite (deepCopy .Values.edge.settings) $settings (dict "limits" (default dict .Values.edge.settings.limits)) | toYaml -}}
{{- end -}}
